"""Makes the modules `spooled_pb2` and `spooled_pb2_grpc` from `spooled.proto`; run it as a program.

The tools come with grpcio-tools (extra `test`). Output differs between their versions, and code of a newer one does not
run with an older protobuf, so the one in TOOLS is used: the oldest that the service's own SDK works with. Two things
are changed in what protoc writes. Imports name the package. And messages get a descriptor pool of their own: a program
that has the SDK loaded as well would otherwise have two files that describe the package `spooled.v1`, which protobuf
refuses.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = "1.80.0"
NAMES = ("spooled_pb2.py", "spooled_pb2.pyi", "spooled_pb2_grpc.py")

_DEFAULT_POOL = "_descriptor_pool.Default().AddSerializedFile("
_OWN_POOL = """
# Not the default pool: another description of this package may be there already.
_pool = _descriptor_pool.DescriptorPool()
for _imported in (google_dot_protobuf_dot_struct__pb2, google_dot_protobuf_dot_timestamp__pb2):
    _pool.AddSerializedFile(_imported.DESCRIPTOR.serialized_pb)

DESCRIPTOR = _pool.AddSerializedFile("""
_PLAIN_IMPORT = "import spooled_pb2 as spooled__pb2"
_PACKAGE_IMPORT = "from spooled_supervisor.proto import spooled_pb2 as spooled__pb2"


def tools_version() -> str | None:
    """The version of grpcio-tools that is installed here, if any."""
    try:
        return metadata.version("grpcio-tools")
    except metadata.PackageNotFoundError:
        return None


def generate() -> dict[str, str]:
    """What each generated file has to contain. Raises ImportError without grpcio-tools."""
    from grpc_tools import protoc

    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as made:
        outs = [f"--{kind}_out={made}" for kind in ("python", "pyi", "grpc_python")]
        status = protoc.main(["protoc", f"-I{HERE}", f"-I{well_known}", *outs, str(HERE / "spooled.proto")])
        if status:
            raise SystemExit(status)
        return {name: _adapted((Path(made) / name).read_text("utf-8")) for name in NAMES}


def _adapted(text: str) -> str:
    text = text.replace(f"\nDESCRIPTOR = {_DEFAULT_POOL}", _OWN_POOL)
    return text.replace(_PLAIN_IMPORT, _PACKAGE_IMPORT)


def main() -> int:
    if tools_version() != TOOLS:
        sys.stderr.write(f"grpcio-tools {TOOLS} is needed, and {tools_version() or 'none'} is installed\n")
        return 1
    for name, text in generate().items():
        (HERE / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
