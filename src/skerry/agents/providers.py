"""Who serves models: the host, the header that holds the key, and the variable it is usually kept in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelProvider:
    host: str
    variable: str
    header: str = "Authorization"
    scheme: str = "Bearer {value}"


PROVIDERS = {
    "anthropic": ModelProvider("api.anthropic.com", "ANTHROPIC_API_KEY", "x-api-key", "{value}"),
    "cerebras": ModelProvider("api.cerebras.ai", "CEREBRAS_API_KEY"),
    "cohere": ModelProvider("api.cohere.com", "COHERE_API_KEY"),
    "deepseek": ModelProvider("api.deepseek.com", "DEEPSEEK_API_KEY"),
    "fireworks-ai": ModelProvider("api.fireworks.ai", "FIREWORKS_API_KEY"),
    "google": ModelProvider("generativelanguage.googleapis.com", "GEMINI_API_KEY", "x-goog-api-key", "{value}"),
    "groq": ModelProvider("api.groq.com", "GROQ_API_KEY"),
    "mistral": ModelProvider("api.mistral.ai", "MISTRAL_API_KEY"),
    "openai": ModelProvider("api.openai.com", "OPENAI_API_KEY"),
    "opencode": ModelProvider("opencode.ai", "OPENCODE_API_KEY"),
    "openrouter": ModelProvider("openrouter.ai", "OPENROUTER_API_KEY"),
    "togetherai": ModelProvider("api.together.xyz", "TOGETHER_API_KEY"),
    "xai": ModelProvider("api.x.ai", "XAI_API_KEY"),
}
"""By the name that OpenCode has for them."""

_BY_PACKAGE = {"@ai-sdk/anthropic": "anthropic", "@ai-sdk/google": "google"}


def speaks_like(id: str, package: object) -> ModelProvider | None:
    """The one whose way of showing a key a provider has: its own, or that of the package it is spoken to with."""
    return PROVIDERS.get(_BY_PACKAGE.get(str(package), id))
