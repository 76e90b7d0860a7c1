"""Long-lived coding sessions: prompts in a queue, an agent in a sandbox that comes and goes, people who watch."""
