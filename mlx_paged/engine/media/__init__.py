"""Pictures, clips and sounds in prompts."""
