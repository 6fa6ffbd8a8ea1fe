#!/usr/bin/env bash
# The clients in an environment of their own, once: about a minute and 0.5 GB. Prints the environment's folder.
# Exit code 3: this machine cannot have it; the reason is on stderr.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/hitherto/clients-$(cat requirements.txt | sha256sum | cut -c 1-12)

mkdir -p "$folder"
exec 9> "$folder.lock"
flock 9   # two runs at once: the second finds the work done
if [ ! -f "$folder/ready" ]; then
  echo "Setting up clients in $folder (once, about a minute and 0.5 GB) ..." >&2
  rm -rf "$folder"
  "$python" -m venv "$folder" >&2 || { echo "clients: $python -m venv does not work" >&2; exit 3; }
  "$folder/bin/pip" install --quiet --disable-pip-version-check --requirement requirements.txt > "$folder/install.log" 2>&1 ||
    { tail -5 "$folder/install.log" >&2; echo "clients: they cannot be installed, for the reason above" >&2; exit 3; }
  touch "$folder/ready"
fi
echo "$folder"
