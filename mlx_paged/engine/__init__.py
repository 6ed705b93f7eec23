"""The engine: joins the state half (what to run) and the device half (how)."""
