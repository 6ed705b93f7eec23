"""Chat templates as programs: the variables that they read, and probes of their output."""
