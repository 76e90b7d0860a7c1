"""The code interpreter: contexts that keep their state, and the executors inside the sandbox that run them."""
