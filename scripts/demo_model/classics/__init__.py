"""Hand-written answers to common requests: real Python, read as data and never imported."""
