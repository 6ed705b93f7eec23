"""Analysis of chat templates: the variables that they read, and probes of their output."""
