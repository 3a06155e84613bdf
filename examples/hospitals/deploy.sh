#!/usr/bin/env bash
# A real federation on this machine: one SuperLink, and a SuperNode for each hospital with its own key and folder.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: deploy.sh [--rounds N] [--nodes N] [--strategy fedsso|fedavg] [--data FOLDER] [--out FOLDER]

Starts a Flower SuperLink with TLS and node authentication and up to four SuperNodes on the loopback interface, runs
this app on them, shows the result, and ends every process it started. Keys, certificates, logs and the hospitals' data
folders lie in a temporary folder that is removed; after a failure it is kept, and named.

  --rounds    rounds of training, 8 if not said
  --nodes     hospitals, 1 to 4: Cleveland, Hungary, Switzerland, Long Beach; 4 if not said
  --strategy  fedsso if not said
  --data      folder of processed.NAME.data; if not said $FEDSSO_DATA, else where `fedsso data get heart` puts them
  --out       folder for the model, the trace and its picture; ./out if not said
TEXT
}

fail() {
  echo "deploy.sh: $1" >&2
  exit 1
}

rounds=8 nodes=4 strategy=fedsso out=out
data=${FEDSSO_DATA:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/fedsso}
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --rounds | --nodes | --strategy | --data | --out)
      case ${2:-} in '' | --*) fail "$1 needs a value; see --help" ;; esac
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    *) fail "unknown option $1; see --help" ;;
  esac
done

# ---- what must be there ----

app=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -x "$app/../../.venv/bin/flwr" ] && PATH=$(cd "$app/../../.venv/bin" && pwd):$PATH
has() { command -v "$1" >/dev/null || fail "there is no $1: install $2"; }
has flower-superlink "fedsso with its extra: pip install 'fedsso[flower]'"
has openssl "openssl (Debian, Ubuntu: apt-get install openssl)"
has ssh-keygen "OpenSSH's client (Debian, Ubuntu: apt-get install openssh-client)"
hospitals=(cleveland hungarian switzerland va)
case $nodes in [1-4]) ;; *) fail "--nodes must be 1 to 4, got $nodes" ;; esac
case $rounds in '' | 0* | *[!0-9]*) fail "--rounds must be a whole number from 1 on, got $rounds" ;; esac
case $strategy in fedsso | fedavg) ;; *) fail "--strategy must be fedsso or fedavg, got $strategy" ;; esac
for name in "${hospitals[@]:0:nodes}"; do
  [ -f "$data/processed.$name.data" ] || fail "no file $data/processed.$name.data: run fedsso data get heart, or say --data"
done
data=$(cd "$data" && pwd)
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || fail "cannot write to $out: say another folder with --out"
out=$(cd "$out" && pwd)

# ---- every process that is started here ends here ----

work=$(mktemp -d)

ours() { # all processes below this script, whoever is their parent by now: they have its FLWR_HOME
  grep -lsz "^FLWR_HOME=$work/flwr$" /proc/[0-9]*/environ | cut -d/ -f3 || true
  jobs -p
}

alive() { # those of the processes given that still run
  local process
  for process in "$@"; do if kill -0 "$process" 2>/dev/null; then echo "$process"; fi; done
}

mark=0
done_with() {
  printf '%-44s %4d s\n' "$1" $((SECONDS - mark))
  mark=$SECONDS
}

finish() {
  local code=$? all
  mark=$SECONDS
  trap - EXIT
  trap '' HUP INT PIPE TERM
  all=$(alive $(ours | sort -u))
  kill $all 2>/dev/null || true
  for _ in $(seq 50); do [ -z "$(alive $all)" ] || sleep 0.1; done
  kill -9 $(alive $all $(ours)) 2>/dev/null || true
  wait
  [ -z "$all" ] || done_with "$(echo $all | wc -w) processes ended"
  case $code in
    0 | 129 | 130 | 141 | 143) rm -rf "$work" ;;
    *) echo "deploy.sh: failed; keys and logs are in $work" >&2 ;;
  esac
  exit "$code"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM

# ---- certificates, keys, folders ----

cd "$work"
export FLWR_HOME=$work/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
export OMP_NUM_THREADS=1 # all hospitals share this machine
printf 'subjectAltName=IP:127.0.0.1\n' >names
{
  openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=hospitals" -keyout ca.key -out ca.crt
  openssl req -newkey rsa:2048 -nodes -subj "/CN=127.0.0.1" -keyout server.key -out server.csr
  openssl x509 -req -days 2 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names -out server.pem
} 2>openssl.log
for name in "${hospitals[@]:0:nodes}"; do
  mkdir "$name" && cp "$data/processed.$name.data" "$name/"
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "$name" -f "$name.key"
done
ports=($(python3 -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
print(*(one.getsockname()[1] for one in held))'))
superlink=127.0.0.1:${ports[0]}
mkdir "$FLWR_HOME"
printf '[superlink]\ndefault = "hospitals"\n\n[superlink.hospitals]\naddress = "%s"\nroot-certificates = "%s"\n' \
  "$superlink" "$work/ca.crt" >"$FLWR_HOME/config.toml"
done_with "certificates, keys, data folders"

# ---- the SuperLink, the hospitals' keys, the SuperNodes ----

flower-superlink --host 127.0.0.1 --port "${ports[0]}" --enable-supernode-auth \
  --database state.db --disable-runtime-dependency-installation \
  --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key >superlink.log 2>&1 &
until (: <"/dev/tcp/127.0.0.1/${ports[0]}") 2>/dev/null; do
  [ -n "$(jobs -rp)" ] || fail "the SuperLink did not start: $(tail -n 3 superlink.log)"
  sleep 0.1
done
done_with "SuperLink with TLS on $superlink"

for i in $(seq 0 $((nodes - 1))); do
  name=${hospitals[i]}
  flwr supernode register "$name.key.pub" --name "$name" >>register.log 2>&1 || fail "$(tail -n 5 register.log)"
  flower-supernode --superlink "$superlink" --root-certificates ca.crt \
    --auth-supernode-private-key "$name.key" --host 127.0.0.1 --port "${ports[i + 1]}" \
    --node-config "data-folder=\"$work/$name\"" >"$name.log" 2>&1 &
done
until [ "$(flwr supernode list --format json | grep -c '"status": "online"')" = "$nodes" ]; do
  [ "$(jobs -rp | wc -l)" -gt "$nodes" ] || fail "a SuperNode did not start: $(tail -n 3 ./*.log)"
  sleep 0.2
done
done_with "hospitals registered and online: $nodes"

# ---- the run ----

flwr run "$app" --stream -c "num-server-rounds=$rounds strategy=\"$strategy\" min-nodes=$nodes out=\"$out\"" &
wait $! # not in the foreground, where a signal would have to wait for its end
flwr ls --format json | grep -q '"status": "finished:completed"' || fail "the run did not end well, see above"
done_with "rounds of $strategy: $rounds, evaluation in the last"
echo "written to $out:" && ls "$out"
