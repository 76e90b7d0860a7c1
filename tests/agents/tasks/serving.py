"""A server in a process of its own whose only agent is the scripted one."""

from __future__ import annotations

SCRIPTED = """
from skerry.agents import workforce
from tests.agents.tasks.scripted import ScriptedAgent
workforce.AGENTS = {"scripted": ScriptedAgent()}
"""
