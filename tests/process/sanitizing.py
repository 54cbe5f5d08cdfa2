"""The kernel's modules built with the sanitizers of addresses and of undefined behaviour, which end a process at the first mistake."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

from syncvar import kernel


def sanitized(name, folder):
    """Build a module of the kernel, and return the variables with which workers load it."""
    compiler = shutil.which("gcc")
    assert compiler, "apt-get install gcc"
    source, built = Path(kernel.__file__).with_name(f"{name}.c"), folder / f"{name}.so"
    include = f"-I{sysconfig.get_path('include')}"
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler, *flags, include, str(source), "-o", str(built)], check=True, timeout=120)
    (folder / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('syncvar.kernel.{name}', {str(built)!r})\n"
        "sys.modules[spec.name] = made = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(made)\n"
    )
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], check=True, timeout=60, capture_output=True, text=True).stdout.strip()
    return {"LD_PRELOAD": library, "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(folder)}
