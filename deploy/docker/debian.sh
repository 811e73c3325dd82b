#!/usr/bin/env bash
# A base for the images where no registry can be had: Debian's own packages by mmdebstrap, as root.
#   deploy/docker/debian.sh [IMAGE]      # localhost/debian-python:3.11, to be given as PYTHON_IMAGE and DEBIAN_IMAGE
set -euo pipefail
IMAGE=${1:-localhost/debian-python:3.11}
ENGINE=${ENGINE:-$(command -v podman || command -v docker)}
# The same packages give the same bytes.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0}
made=$(mktemp -d)
trap 'rm -r "$made"' EXIT

skip=()
for path in doc info lintian locale man; do skip+=(--dpkgopt="path-exclude=/usr/share/$path/*"); done
skip+=(--dpkgopt='path-include=/usr/share/doc/*/copyright')   # licences stay
mmdebstrap --quiet --variant=minbase --include=ca-certificates,libpython3.11,python3,python3-venv "${skip[@]}" \
  --aptopt='Acquire::Retries "3"' \
  --customize-hook='ln -s python3 "$1/usr/bin/python"' \
  --customize-hook='rm -rf "$1"/var/log/*.log "$1"/var/log/apt "$1"/var/cache/ldconfig/aux-cache' \
  bookworm "$made/all.tar"
# What stands in /dev is the engine's: a folder there would lend its owner to what a pod mounts over it.
mmtarfilter --path-exclude='/dev/*' < "$made/all.tar" > "$made/base.tar"
"$ENGINE" import --quiet -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$made/base.tar" "$IMAGE"
