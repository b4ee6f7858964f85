#!/usr/bin/env bash
# Installs the Debian packages that are missing, when root; otherwise names the command.
# usage: scripts/system_packages.sh COMMAND=PACKAGE...
set -eu
missing=()
for pair in "$@"; do
  command -v "${pair%%=*}" >/dev/null 2>&1 || missing+=("${pair##*=}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
  echo "Missing: ${missing[*]}. Install them with your system's package manager." >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "Missing system packages. Run: sudo apt-get install -y ${missing[*]}" >&2
  exit 1
fi
echo "Installing ${missing[*]}"
(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}") >/tmp/course-llm-apt.log 2>&1 ||
  { tail -n 20 /tmp/course-llm-apt.log >&2; exit 1; }
