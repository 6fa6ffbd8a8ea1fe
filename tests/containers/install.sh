#!/usr/bin/env bash
# What `make test-compose` runs containers with, without a daemon and without a registry of images: podman, podman-compose,
# and images made of Debian's packages under the tags that compose.yaml names. Once: about 2 minutes and 1.5 GB.
# Prints the folder, which has a store of images of its own: the stand-ins are not seen by the machine's own podman.
# Exit code 3: this machine cannot have it; the reason is on stderr.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/hitherto/containers
run=/run/hitherto-containers-$(echo "$folder" | sha256sum | cut -c1-8)   # what a restart of the machine removes
made_by=$(sha256sum "$here/install.sh" | cut -c1-16)

cannot() { echo "Containers: $1" >&2; exit 3; }

[ "$(id -u)" = 0 ] || cannot "only root can run them in this way"
command -v apt-get > /dev/null || cannot "they are set up with apt-get, which is not here"
mkdir -p "$folder"
exec 9> "$folder.lock"
flock 9   # two runs at once: the second finds the work done
[ "$(cat "$folder/ready" 2>/dev/null)" != "$made_by" ] || { echo "$folder"; exit; }
echo "Setting up podman and images in $folder (once, about 2 minutes and 1.5 GB) ..." >&2

# netavark needs iptables, names between containers aardvark-dns, `init: true` catatonit.
packages=(podman runc debootstrap netavark aardvark-dns iptables catatonit)
install() { apt-get install -y -qq --no-install-recommends "${packages[@]}"; }
dpkg -s "${packages[@]}" > /dev/null 2>&1 || install > "$folder/install.log" 2>&1 ||
  { apt-get update -qq && install; } >> "$folder/install.log" 2>&1 ||
  { tail -5 "$folder/install.log" >&2; cannot "apt-get cannot install ${packages[*]}"; }

test -x "$folder/podman-compose/bin/podman-compose" || {
  "${PYTHON:-python3}" -m venv "$folder/podman-compose" >&2
  "$folder/podman-compose/bin/pip" install --quiet --disable-pip-version-check podman-compose==1.6.0 >&2
}

# runc and cgroupfs, since crun refuses a machine with both kinds of cgroups. podman's own limits of files and processes
# are above what may be set where this root is itself confined.
cat > "$folder/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "$run/libpod"
[network]
network_backend = "netavark"
network_config_dir = "$folder/networks"
CONF
cat > "$folder/storage.conf" <<CONF
[storage]
driver = "overlay"
graphroot = "$folder/storage"
runroot = "$run/storage"
CONF
export CONTAINERS_CONF=$folder/containers.conf CONTAINERS_STORAGE_CONF=$folder/storage.conf

mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Origin: Debian' 'Label: Debian' | head -1)
test -n "$mirror" || cannot "apt names no mirror of Debian's packages, which the images are made of: apt-get update"
base=docker.io/library/python:3.11-slim-bookworm
podman image exists $base 2>/dev/null || {
  rm -rf "$folder/base"
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
    bookworm "$folder/base" "$mirror" > "$folder/debootstrap.log" 2>&1 ||
    { tail -3 "$folder/debootstrap.log" >&2; cannot "debootstrap failed"; }
  ln -sf python3 "$folder/base/usr/bin/python"
  tar -C "$folder/base" -c . | podman import --quiet - $base >&2
  rm -rf "$folder/base"
}

make_image() { # TAG, with a Dockerfile on standard input
  podman build --quiet --isolation=chroot --pull=never --network=host --tag "docker.io/$1" - >> "$folder/images.log" 2>&1 ||
    { tail -5 "$folder/images.log" >&2; cannot "cannot make an image for $1"; }
}
# As in the images of that name: who runs it, where it is, what it is started with.
make_image library/redis:7.4-alpine <<IMAGE
FROM $base
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && usermod --uid 999 redis
WORKDIR /data
CMD ["redis-server"]
IMAGE
make_image prom/prometheus:v2.55.1 <<IMAGE
FROM $base
RUN apt-get update && apt-get install -y --no-install-recommends prometheus wget \
 && install --directory --owner nobody --group nogroup /prometheus && rm -rf /etc/prometheus/*
WORKDIR /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
IMAGE
echo "$made_by" > "$folder/ready"
echo "$folder"
