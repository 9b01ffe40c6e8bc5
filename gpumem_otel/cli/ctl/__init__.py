"""`gpumem-otel ctl`: finds jobs, asks them to yield or restore, and shows their answers."""
