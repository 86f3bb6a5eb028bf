from __future__ import annotations

import subprocess
import sys


def test_the_package_imports_without_torch():
    probe = "import sys, kvcache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
