"""Low-rank adapters: requests that name one, their files, and those in memory."""
