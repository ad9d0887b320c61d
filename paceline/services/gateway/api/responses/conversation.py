"""The base of a conversation's items, and the chat messages that they become."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import ConfigDict

from paceline.services.gateway.planning.chat_schemas import ContentPart, text_of
from paceline.services.gateway.planning.request_body import Body

Json = dict[str, Any]
Content: TypeAlias = str | list[ContentPart]


class ToolNames(Protocol):
    """Translates names of tools: from the client's names to the names that the model knows."""

    def name_for_model(self, name: str, namespace: str | None) -> str: ...


class Messages:
    """Builds a list of chat messages from items. Consecutive items of the model become one message."""

    def __init__(self, instructions: str | None, names: ToolNames) -> None:
        self.names = names
        self._messages: list[Json] = []
        """Messages whose content and reasoning are still lists of pieces. Joining each new piece would take quadratic
        time."""
        if instructions:
            self.add("system", instructions)

    def add(self, role: str, content: Content, **fields: Any) -> None:
        """Add a message. System messages at the beginning are joined into one."""
        if role in ("system", "developer"):
            role = "system"
            if len(self._messages) == 1 and self._messages[0]["role"] == "system":
                self._messages[0]["content"].append(content)
                return
        self._messages.append({"role": role, "content": [content], **fields})

    def answer(self) -> Json:
        """Return the message of the model that the next items of the model extend; begin one if there is none."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self._messages[-1]

    def add_text(self, field: Literal["content", "reasoning"], text: Content) -> None:
        """Add text to the model's message."""
        self.answer().setdefault(field, []).append(text)

    def add_call(self, call_id: str, name: str, namespace: str | None, arguments: str) -> None:
        """Add a tool call to the model's message."""
        function = {"name": self.names.name_for_model(name, namespace), "arguments": arguments}
        self.answer().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def whole(self) -> list[Json]:
        """Return all messages in the form of a chat's `messages`."""
        fields = ("content", "reasoning")
        return [
            {**message, **{field: _joined(message[field]) for field in fields if field in message}}
            for message in self._messages
        ]


def _joined(pieces: Sequence[Content]) -> Content:
    """Return the pieces of a message as one content. A single piece stays unchanged; several become one text."""
    written = [piece for piece in pieces if piece]
    return written[0] if len(written) == 1 else "\n\n".join(map(text_of, written))


class ConversationItem(Body):
    """The base class of a conversation's items."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    id: str | None = None

    @abstractmethod
    def add_to(self, messages: Messages) -> None:
        """Add the item's content to the messages that the model sees."""

    def stored(self, new_id: str) -> Json:
        """Return the item as OpenAI lists it, with a new id if it has none."""
        fields = self.model_dump(exclude_none=True)
        return {"id": self.id or f"{id_prefix(fields['type'])}_{new_id}", **fields}


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "computer_call": "cu",
    "computer_call_output": "cuo",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "mcp_call": "mcp",
}


def id_prefix(kind: str) -> str:
    """Return the prefix of the ids of items of a type."""
    return _PREFIXES.get(kind, "item")
