#!/bin/bash
# Builds the native kernels for aarch64 with a cross compiler, and runs their tests under user-mode emulation: on a
# processor with BF16 and on one without. Emulation shows neither speed nor a weak order of memory.
#
# Needs Debian with g++-aarch64-linux-gnu and qemu-user, and .venv. Everything is in build/aarch64 (3 GB), and a second
# run uses what is there. Arguments go to pytest, for example -k llama.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
here=$PWD/build/aarch64
root=$here/root
# The last release of torch whose build for aarch64 on PyPI works without CUDA libraries, which have some gigabytes.
torch=torch==2.10.0
# neoverse-n1 (Graviton 2, Ampere Altra) is the oldest on which torch runs. SVE is not used here, and slow if emulated.
processors=(neoverse-n1 max,sve=off,pauth-impdef=on)
tests=(
    tests/models/test_model_tokens.py
    tests/models/test_model_invariance.py
    tests/kernels/test_batch_invariance.py
    tests/kernels/test_coded_caches.py
    tests/kernels/test_quantized.py
    tests/kernels/test_fused.py
    tests/kernels/test_turns.py
    tests/engine/test_pool_directory.py
)
most_seconds=1200  # for each processor

for tool in aarch64-linux-gnu-g++ qemu-aarch64 apt-get dpkg; do
    command -v $tool >/dev/null || {
        echo "$tool is missing; as root: apt-get install g++-aarch64-linux-gnu qemu-user (Debian)" >&2
        exit 1
    }
done
mkdir -p "$here"

# Prints the version of the emulated Python, like 3.11.
version() { basename "$(echo "$root"/usr/bin/python3.*)" | sed 's/^python//'; }

echo "[1/4] Debian packages of Python for arm64"
if [ ! -e "$root/.ready" ]; then
    rm -rf "$root" "$here/apt"
    mkdir -p "$here"/apt/{state/lists/partial,cache/archives/partial} "$root"
    : >"$here/apt/status"
    # Lists and packages of apt's own architecture stay as they are.
    cat >"$here/apt/apt.conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
Dir::State "$here/apt/state";
Dir::State::status "$here/apt/status";
Dir::Cache "$here/apt/cache";
END
    APT_CONFIG=$here/apt/apt.conf apt-get update -qq
    APT_CONFIG=$here/apt/apt.conf apt-get install -qq --yes --download-only python3 libgomp1 libstdc++6 >/dev/null
    for package in "$here"/apt/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
    touch "$root/.ready"
fi

echo "[2/4] packages of requirements.lock for aarch64, but $torch"
if [ ! "$here/site/.ready" -nt requirements.lock ]; then
    rm -rf "$here/site"
    platforms=()
    for glibc in 17 24 26 27 28 31; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    # Dependencies are all in the lock, except for one that redis needs with Debian 12's release of Python.
    grep -v '^torch==' requirements.lock >"$here/requirements"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile --target "$here/site" \
        "${platforms[@]}" --platform manylinux2014_aarch64 --python-version "$(version)" --only-binary=:all: \
        -r "$here/requirements" "$torch" async-timeout
    # Bytecode depends on the version of Python only.
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$(version)" ]; then
        "$python" -m compileall -q -j 0 "$here/site" "$root/usr/lib/python$(version)" >/dev/null || true
    fi
    touch "$here/site/.ready"
fi

echo "[3/4] the library, cross-compiled with the flags of setup.py"
library=paceline/kernels/native/_library.abi3.so
CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ LDSHARED="aarch64-linux-gnu-g++ -shared" \
    LDCXXSHARED="aarch64-linux-gnu-g++ -shared" \
    "$python" setup.py --quiet build_ext --build-lib "$here/lib" --build-temp "$here/objects"
# A failed build is no error for setup.py.
for source in paceline/kernels/native/src/*; do
    [ "$here/lib/$library" -nt "$source" ] || { echo "the library was not built" >&2; exit 1; }
done
rm -rf "$here/source"
mkdir -p "$here/source"
git ls-files --cached --others --exclude-standard -- paceline tests bench pyproject.toml requirements.lock |
    while read -r file; do [ ! -e "$file" ] || echo "$file"; done | tar cf - -T - | tar xf - -C "$here/source"
cp "$here/lib/$library" "$here/source/$library"

# Tests start further processes with sys.executable, so it is a script that emulates, too.
cat >"$here/python" <<END
#!/bin/bash
exec qemu-aarch64 -0 "$here/python" -cpu "\$EMULATED" -L "$root" "$root/usr/bin/python$(version)" "\$@"
END
chmod +x "$here/python"

cd "$here/source"
export PYTHONPATH=$here/source:$here/site
for processor in "${processors[@]}"; do
    export EMULATED=$processor
    echo "[4/4] tests on $processor, with the instruction sets" "$("$here/python" -c '
from paceline.kernels.native.library import instruction_sets
print(*instruction_sets())' 2>/dev/null)"
    # Other backends are tested without emulation.
    timeout $most_seconds "$here/python" -m pytest -q -p no:cacheprovider -p no:xdist \
        -k "not portable and not reference and not triton" "${tests[@]}" "$@"
done
