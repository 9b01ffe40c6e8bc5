"""Settings: options, the environment, the files they name, and who this process is in its job."""
