"""One module per command: its name and help, its arguments, and what it does."""
