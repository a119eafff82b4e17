"""Writes a GGUF file's matrices in another type, from the values that they have: for comparing engines type by type.

    requantise.py MODEL.gguf OUT.gguf TYPE     F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0

Everything else is copied. Quality is that of a second rounding, so nobody should run the result for its answers.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import gguf
    import numpy as np
    from gguf.quants import dequantize, quantize
except ImportError as error:
    sys.exit(f"requantise.py needs the packages gguf and numpy: {error}; pip install gguf")

TYPES = ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def write(source: Path, target: Path, type_name: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    kind = gguf.GGMLQuantizationType[type_name]
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    if len(sys.argv) != 4 or sys.argv[3] not in TYPES:
        print(__doc__, file=sys.stderr)
        return 2
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    return 0


if __name__ == "__main__":
    sys.exit(main())
