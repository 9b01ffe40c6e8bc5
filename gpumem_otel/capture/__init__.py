"""The live source inside a job: recorder, windows, steps, frame names, device statistics."""
