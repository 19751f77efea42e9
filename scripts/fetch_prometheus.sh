#!/usr/bin/env bash
# Puts prometheus and promtool, out of Debian's or Ubuntu's package, into the folder that is named: for the tests of the
# dashboard and the alerts, which do without where this fails. Needs no root and installs nothing.
set -euo pipefail

into="$(realpath "$1")"
here() { command -v "$1" >/dev/null || [[ -x "$into/$1" ]]; }
if here prometheus && here promtool; then exit; fi

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p lists/partial cache/archives/partial
apt() {
    timeout 120 apt-get -qq -o Dir::State::lists="$folder/lists" -o Dir::Cache="$folder/cache" -o APT::Sandbox::User= "$@"
}
echo "fetch prometheus and promtool (20 MB)"
{
    apt update && apt download prometheus &&
        dpkg-deb --extract prometheus_*.deb tree && mv tree/usr/bin/prometheus tree/usr/bin/promtool "$into"
} </dev/null || echo "  NOT TO BE HAD: tests that need a real Prometheus will skip"
