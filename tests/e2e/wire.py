"""A client made from the .proto files alone: protoc's descriptors, plain grpcio, nothing of the server's own code.

The descriptors live in a pool of their own, so that no generated stub of the repository can stand in for what the
.proto files lack.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    import grpc
    from google.protobuf.descriptor import MethodDescriptor

PROTOS = Path(__file__).resolve().parents[2] / "protos"


class Contract:
    """The messages and services of radixd.v1; each message class is an attribute.

    Args:
        scratch: An empty folder to compile in.
    """

    def __init__(self, scratch: Path) -> None:
        compiled = scratch / "radixd.binpb"
        files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "radixd").rglob("*.proto"))
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS), "--include_imports"),
                *(f"--descriptor_set_out={compiled}", *files),
            ],
            check=True,
        )
        pool = descriptor_pool.DescriptorPool()
        described = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
        for file in described.file:
            pool.Add(file)
        self.methods: dict[str, MethodDescriptor] = {}
        for file in described.file:
            if file.package != "radixd.v1":
                continue
            for message in file.message_type:
                found = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
                setattr(self, message.name, message_factory.GetMessageClass(found))
            for service in file.service:
                found = pool.FindServiceByName(f"{file.package}.{service.name}")
                self.methods.update(found.methods_by_name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"radixd.v1 has no message {name}")


class Client:
    """Calls a server; each method of every service is an attribute, such as ``client.Generate(request)``."""

    def __init__(self, contract: Contract, channel: grpc.Channel) -> None:
        self.channel = channel
        for name, method in contract.methods.items():
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            request, response = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
            call = make(
                f"/{method.containing_service.full_name}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"radixd.v1 has no method {name}")


class Collected:
    """A finished stream, sorted: what was started, each index's text and ids, and how each ended."""

    def __init__(self, responses: Any) -> None:
        self.started: Any = None
        self.deltas: list[Any] = []
        self.finished: dict[int, Any] = {}
        for response in responses:
            self.add(response)

    def add(self, response: Any) -> None:
        """Takes the next response, and checks what holds for every stream."""
        kind = response.WhichOneof("event")
        if kind == "started":
            assert self.started is None, "Started comes once"
            assert not self.deltas, "Started comes first"
            self.started = response.started
        elif kind == "delta":
            assert response.delta.text or response.delta.token_ids, "a Delta is never empty"
            assert response.delta.index not in self.finished, "nothing follows an index's Finished"
            self.deltas.append(response.delta)
        else:
            assert response.finished.index not in self.finished, "one Finished for each index"
            self.finished[response.finished.index] = response.finished

    def text(self, index: int = 0) -> str:
        """The whole text of one index."""
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def ids(self, index: int = 0) -> list[int]:
        """All ids of one index."""
        return [i for delta in self.deltas if delta.index == index for i in delta.token_ids]
