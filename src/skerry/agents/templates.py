"""Tasks that people ask for again and again, with blanks to fill in."""

from __future__ import annotations

import re
from collections.abc import Mapping

from skerry.agents.task_models import Placeholder, TaskTemplate
from skerry.errors import InvalidRequestError

_BLANK = re.compile(r"\{\{(\w+)\}\}")


def _template(
    id: str, name: str, icon: str, category: str, description: str, prompt: str, **blanks: str | list[str]
) -> TaskTemplate:
    placeholders = [
        Placeholder(name=blank, label=blank.replace("_", " ").capitalize(), type="select", options=kind)
        if isinstance(kind, list)
        else Placeholder.model_validate({"name": blank, "label": blank.replace("_", " ").capitalize(), "type": kind})
        for blank, kind in blanks.items()
    ]
    return TaskTemplate(
        id=id,
        name=name,
        icon=icon,
        category=category,
        description=description,
        prompt=prompt,
        placeholders=placeholders,
    )


TEMPLATES = {
    template.id: template
    for template in (
        _template(
            "fix-tests",
            "Fix the failing tests",
            "🧪",
            "maintenance",
            "Run the tests, find out why some fail, and mend the code.",
            "Run the tests of this project with: {{command}}\nFind out why some of them fail and mend the cause in the "
            "code. Change a test only if it is wrong, and say why. Run them again at the end and report the result.",
            command="text",
        ),
        _template(
            "implement",
            "Implement a feature",
            "✨",
            "development",
            "Write a feature, with tests.",
            "Implement the following in this project, in the style of the code around it, and with tests that fail "
            "without it:\n\n{{feature}}\n\nRun all tests at the end.",
            feature="textarea",
        ),
        _template(
            "review",
            "Review the code",
            "🔍",
            "review",
            "Read code and report what is wrong with it, the worst first.",
            "Review {{path}} with an eye on {{focus}}. Report what is wrong, the worst first, each with file and line, "
            "why it matters and how to mend it. Change nothing.",
            path="text",
            focus=["correctness", "security", "speed", "readability"],
        ),
        _template(
            "explain",
            "Explain the project",
            "📖",
            "review",
            "Say what a project does and how it is built.",
            "Read this project and explain it to {{reader}}: what it does, how it is built, where to begin reading. "
            "Change nothing.",
            reader=["a new colleague", "a user", "an auditor"],
        ),
        _template(
            "update-dependencies",
            "Update the dependencies",
            "📦",
            "maintenance",
            "Bring dependencies up to date as far as the tests agree.",
            "Bring the dependencies of this project up to date, one after the other, and run the tests after each. "
            "Leave out what breaks them, and report which and why.",
        ),
    )
}


def filled(id: str, values: Mapping[str, str], message: str) -> str:
    """The template with its blanks filled in, and after it what was written beside it."""
    template = TEMPLATES.get(id)
    if template is None:
        raise InvalidRequestError(
            f"There is no template {id[:60]!r}.",
            hint=f"There are {', '.join(TEMPLATES)}: GET /api/v2/agents/templates.",
        )
    names = {blank.name for blank in template.placeholders}
    missing, unknown = names - values.keys(), values.keys() - names
    if missing or unknown:
        said = [f"wants a value for {', '.join(sorted(missing))}"] if missing else []
        said += [f"has no {', '.join(sorted(unknown))}"] if unknown else []
        raise InvalidRequestError(
            f"Template {id!r} {' and '.join(said)}.",
            hint="Send `values`, or --value BLANK=TEXT." if missing else None,
            details={"missing": sorted(missing), "unknown": sorted(unknown)},
        )
    for blank in template.placeholders:
        if blank.options is not None and values[blank.name] not in blank.options:
            raise InvalidRequestError(
                f"Template {id!r} has no {blank.name} {values[blank.name][:60]!r}.",
                hint=f"There are {', '.join(blank.options)}.",
            )
    text = _BLANK.sub(lambda match: values[match[1]], template.prompt)
    return f"{text}\n\n{message.strip()}" if message.strip() else text
