"""Every method of every service, and messages for them: random ones, and valid ones with small errors."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

import paceline.proto

_UNSIGNED = (0, 1, 2, 15, 16, 17, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
_WIDE = (*_UNSIGNED, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e-30, 1e30, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "\0", "ä🚲", "../../etc/passwd", "%s%n{0}", "\r\nx: y", " " * 300, "x" * 300, "y" * 70_000)
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: _UNSIGNED,
    FieldDescriptor.TYPE_UINT64: _WIDE,
    FieldDescriptor.TYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_SINT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One gRPC method."""

    path: str
    service: str
    request: type[Message]


def methods() -> list[Method]:
    """Return all methods of Paceline's services, by their descriptors, and of the health service."""
    files: list[FileDescriptor] = [health_pb2.DESCRIPTOR]
    for module in pkgutil.iter_modules(paceline.proto.__path__):
        if module.name.endswith("_pb2"):
            files.append(importlib.import_module(f"paceline.proto.{module.name}").DESCRIPTOR)
    return [
        Method(f"/{service.full_name}/{method.name}", service.name.lower(), GetMessageClass(method.input_type))
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def random_message(rng: random.Random, kind: type[Message], depth: int = 0) -> Message:
    """Return a message of this type, in which each field is missing or has an odd value."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.6:
            _fill(rng, message, field, depth)
    return message


def mutate(rng: random.Random, message: Message) -> None:
    """Change or clear one random field, at any depth."""
    places = list(_places(message))
    if not places:
        return
    owner, field = rng.choice(places)
    owner.ClearField(field.name)
    if rng.random() < 0.85:
        _fill(rng, owner, field, depth=1)


def break_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with parts cut off, flipped, repeated or inserted."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(broken) + 1)
        match rng.randrange(5):
            case 0:
                del broken[at:]
            case 1 if at < len(broken):
                broken[at] ^= 1 << rng.randrange(8)
            case 2:
                broken[at:at] = rng.randbytes(rng.randint(1, 40))
            case 3:
                broken += broken[at : at + 64]
            case _:  # a field with a very large length
                broken[at:at] = b"\x0a\xff\xff\xff\xff\x07"
    return bytes(broken)


def _places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type is None or _is_map(field):
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            for each in value:
                yield from _places(each)
        elif message.HasField(field.name):
            yield from _places(value)


def _fill(rng: random.Random, message: Any, field: FieldDescriptor, depth: int) -> None:
    if depth > 4:
        return
    value = getattr(message, field.name)
    if _is_map(field):
        key, entry = field.message_type.fields
        for _ in range(rng.choice((1, 2, 50))):
            value[_scalar(rng, key)] = _scalar(rng, entry)
    elif field.is_repeated:
        for _ in range(rng.choice((1, 1, 2, 3, 40))):
            if field.message_type is not None:
                value.add().CopyFrom(random_message(rng, GetMessageClass(field.message_type), depth + 1))
            else:
                value.append(_scalar(rng, field))
        if field.message_type is None and rng.random() < 0.05:
            value.extend(list(value) * 2000)
    elif field.message_type is not None:
        value.CopyFrom(random_message(rng, GetMessageClass(field.message_type), depth + 1))
    else:
        setattr(message, field.name, _scalar(rng, field))


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type in _INTEGERS:
        return rng.choice(_INTEGERS[field.type])
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(_TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 15, 16, 16, 17, 1000)))
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice(_REALS)
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 99, 2**31 - 1, -1))
    raise AssertionError(f"{field.full_name} has a type that the fuzzer does not know; add it")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
