#!/usr/bin/env bash
# radosgw.sh: a throw-away, single-node Ceph object store on 127.0.0.1 (one
# monitor, one OSD, one radosgw), without systemd, for tests of S3 clients.
#
#   radosgw.sh up DIR [PORT]      start it in the scratch folder DIR (port 7480)
#   radosgw.sh down DIR           stop it and delete DIR
#   radosgw.sh env DIR [PORT]     print shell exports for S3 clients
#   radosgw.sh kill DIR           end the gateway at once; objects stay
#   radosgw.sh revive DIR [PORT]  start the gateway again
#
# RGW_STORE=memstore keeps the objects in memory (4 GiB at most); the default,
# bluestore, keeps them in a sparse 8 GiB file under DIR. RGW_ALSO names a second
# address of this machine at which the gateway listens, from `up` or `revive` on.
#
# Needs: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd
# Only processes whose pid this script recorded under DIR are ever signalled.
set -euo pipefail

cmd=${1:-}
dir=${2:?name a scratch folder}
port=${3:-7480}
mon_port=$((port + 100))
key=testkey secret=testsecret

ceph_() { ceph -c "$dir/ceph.conf" --connect-timeout 20 "$@"; }

spawn() { # spawn NAME COMMAND...: run in the background, record the pid
    local name=$1
    shift
    setsid "$@" >"$dir/$name.out" 2>&1 </dev/null &
    echo $! >"$dir/$name.pid"
}

stop_all() { # stop_all [NAME]...
    local name pid
    for name in ${*:-rgw osd mon}; do
        [ -f "$dir/$name.pid" ] || continue
        pid=$(cat "$dir/$name.pid")
        # The recorded pid must still be a process that names our folder.
        if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$dir/"; then
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
            kill -KILL "$pid" 2>/dev/null || true
        fi
    done
}

up() {
    [ -e "$dir" ] && { echo "$dir exists (run down first)" >&2; exit 1; }
    mkdir -p "$dir"/{mon,osd}
    local fsid
    fsid=$(cat /proc/sys/kernel/random/uuid)
    cat >"$dir/ceph.conf" <<EOF
[global]
fsid = $fsid
mon host = v1:127.0.0.1:$mon_port
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = $dir
admin socket = $dir/\$name.asok
log file = $dir/\$name.log
keyring = $dir/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 1
ms bind ipv6 = false
debug osd = 0/0
debug ms = 0/0
debug mon = 0/0
debug bluestore = 0/0
debug rocksdb = 0/0
debug rgw = 0/0
debug civetweb = 0/0
[mon.a]
mon data = $dir/mon
[osd.0]
osd data = $dir/osd
osd objectstore = ${RGW_STORE:-bluestore}
bluestore block size = 8589934592
memstore device bytes = 4294967296
osd memory target = 939524096
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:$port tcp_nodelay=1
rgw cache enabled = true
rgw thread pool size = 64
rgw max chunk size = 4194304
EOF
    monmaptool --create --fsid "$fsid" --addv a "v1:127.0.0.1:$mon_port" "$dir/monmap" >/dev/null
    ceph-mon -c "$dir/ceph.conf" --mkfs -i a --monmap "$dir/monmap" >"$dir/mkfs.out" 2>&1
    spawn mon ceph-mon -f -c "$dir/ceph.conf" -i a
    # The monitor rejects an OSD whose uuid differs from the one registered.
    local osd_uuid
    osd_uuid=$(cat /proc/sys/kernel/random/uuid)
    ceph_ osd new "$osd_uuid" >/dev/null
    ceph-osd -c "$dir/ceph.conf" -i 0 --mkfs --osd-uuid "$osd_uuid" >>"$dir/mkfs.out" 2>&1
    spawn osd ceph-osd -f -c "$dir/ceph.conf" -i 0
    for _ in $(seq 60); do
        ceph_ osd stat 2>/dev/null | grep -q '1 up' && break
        sleep 0.5
    done
    ceph_ osd stat | grep -q '1 up' || { echo "the OSD did not come up; see $dir/*.log" >&2; exit 1; }
    radosgw-admin -c "$dir/ceph.conf" user create --uid=test --display-name=test \
        --access-key="$key" --secret-key="$secret" >"$dir/user.json" 2>"$dir/user.err"
    gateway
}

gateway() {
    spawn rgw radosgw -f -c "$dir/ceph.conf" -n client.rgw.a \
        ${RGW_ALSO:+--rgw-frontends "beast endpoint=127.0.0.1:$port endpoint=$RGW_ALSO:$port tcp_nodelay=1"}
    for _ in $(seq 120); do
        curl -sf -o /dev/null "http://127.0.0.1:$port/" && { env_; return; }
        sleep 0.5
    done
    echo "radosgw did not answer; see $dir/*.log" >&2
    exit 1
}

env_() {
    cat <<EOF
export AWS_ENDPOINT_URL=http://127.0.0.1:$port AWS_ACCESS_KEY_ID=$key AWS_SECRET_ACCESS_KEY=$secret AWS_DEFAULT_REGION=us-east-1
EOF
}

case $cmd in
up) up ;;
down) stop_all; rm -rf "$dir" ;;
env) env_ ;;
kill) stop_all rgw ;;
revive) gateway ;;
*) sed -n '2,17p' "$0" >&2; exit 2 ;;
esac
