"""Turns conversations into prompts: in the forms and with the variables that a template takes."""
