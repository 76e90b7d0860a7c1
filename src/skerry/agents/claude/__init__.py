"""Claude Code: a program for each prompt, which says what it does on its standard output."""
