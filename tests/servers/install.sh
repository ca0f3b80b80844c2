#!/usr/bin/env bash
# Install the servers that tests/prefetch/store/test_servers.py starts: nginx, Ceph radosgw (apt-get), Azurite (npm, into
# this folder); Prometheus, which scrapes metrics, and Chromium, which shows the live page (apt-get); and FFmpeg's
# libraries (apt-get), which decode sound and video. Best effort: what cannot be installed is said here, and its tests
# skip with the reason.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

have() { command -v "$1" >/dev/null 2>&1; }

attempt() { # attempt WHAT SECONDS COMMAND...: a failure is told and is no failure of the script
    local what=$1 limit=$2 log
    shift 2
    log=$(mktemp)
    if timeout "$limit" "$@" >"$log" 2>&1 </dev/null; then
        echo "servers: $what: installed"
    else
        echo "servers: $what: NOT installed, its tests will skip; the last lines of '$*':"
        tail -n 3 "$log" | sed 's/^/servers:   /'
    fi
    rm -f "$log"
}

packages=()
ldconfig -p | grep -q libavcodec || packages+=(ffmpeg) # for torchcodec: tests of sound and video
have prometheus || packages+=(prometheus) # with promtool: tests/ecosystem/test_ecosystem_metrics.py
have nginx || packages+=(nginx-light)
have radosgw && have ceph-mon && have ceph-osd || packages+=(radosgw ceph-mon ceph-osd)
if [[ ${#packages[@]} -eq 0 ]]; then
    echo "servers: nginx, radosgw, ffmpeg, prometheus: here"
elif have apt-get && [[ $(id -u) -eq 0 ]]; then
    export DEBIAN_FRONTEND=noninteractive
    attempt "apt-get's lists" 120 apt-get update
    attempt "${packages[*]}" 240 apt-get install -y --no-install-recommends "${packages[@]}"
else
    echo "servers: ${packages[*]}: NOT installed, their tests will skip: they need apt-get and root"
fi

if have chromium || have google-chrome; then # for tests/ecosystem/test_ecosystem_top.py
    echo "servers: chromium: here"
elif have apt-get && [[ $(id -u) -eq 0 ]]; then
    attempt chromium 240 apt-get install -y --no-install-recommends chromium
else
    echo "servers: chromium: NOT installed, its tests will skip: it needs apt-get and root"
fi

if [[ -x node_modules/.bin/azurite-blob ]]; then
    echo "servers: azurite: here"
elif have npm; then
    attempt azurite 240 npm install --no-audit --no-fund --no-save --prefix . azurite
else
    echo "servers: azurite: NOT installed, its tests will skip: it needs npm"
fi
exit 0
