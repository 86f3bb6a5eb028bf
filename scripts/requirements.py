"""Prints the requirements of pyproject.toml, one a line: the dependencies, or those of the extra named as argument."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
requirements = project["optional-dependencies"][sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"]
print("\n".join(requirements))
