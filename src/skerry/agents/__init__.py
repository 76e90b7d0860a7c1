"""Agents at work: programs that are given a task in a sandbox and do it with tools of their own."""
