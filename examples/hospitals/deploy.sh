#!/usr/bin/env bash
# A real federation on this machine: one SuperLink, and a SuperNode for each hospital with its own key and folder.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: deploy.sh [--files FOLDER --schema FILE] [--family NAME] [--cluster] [--nodes N] [--data FOLDER] [--out FOLDER]

Starts a Flower SuperLink with TLS and node authentication and a SuperNode for each hospital on the loopback interface,
runs the regression of this app on them, shows the result, and ends every process it started. Keys, certificates, logs
and the hospitals' folders lie in a temporary folder that is removed; after a failure it is kept, and named.

  --files    folder of the hospitals' tables: NAME.csv, or a folder NAME with one CSV file and, if wished, hospital.toml
             with the hospital's own limits; if not said, the four hospitals of heart disease
  --schema   the schema of these tables; `fedsso data schema TABLE --outcome COLUMN --out FILE` writes one
  --family   binomial, gaussian, poisson, cox (with Efron's ties) or "cox breslow"; binomial if not said
  --cluster  also standard errors clustered by hospital
  --nodes    hospitals of heart disease, 1 to 4: Cleveland, Hungary, Switzerland, Long Beach; 4 if not said
  --data     folder of processed.NAME.data; if not said $FEDSSO_DATA, else where `fedsso data get heart` puts them
  --out      folder for the saved model, the table of coefficients and the report; ./out if not said
TEXT
}

fail() {
  echo "deploy.sh: $1" >&2
  exit 1
}

files='' schema='' family=binomial cluster=false nodes=4 out=out
data=${FEDSSO_DATA:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/fedsso}
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --cluster) cluster=true && shift ;;
    --files | --schema | --family | --nodes | --data | --out)
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
has flower-superlink "fedsso with its extra: in a checkout pip install '.[flower]'"
has openssl "openssl (Debian, Ubuntu: apt-get install openssl)"
has ssh-keygen "OpenSSH's client (Debian, Ubuntu: apt-get install openssh-client)"
hospitals=() tables=() # the hospitals' names, and the table or folder of each
if [ -n "$files" ]; then
  [ -n "$schema" ] || fail "--files needs --schema; fedsso data schema writes one from a hospital's table"
  [ -d "$files" ] || fail "no folder $files: say the folder of the hospitals' tables with --files"
  for path in "$(cd "$files" && pwd)"/*; do
    [[ $path = *.csv ]] || compgen -G "$path/*.csv" >/dev/null || continue
    name=$(basename "$path" .csv)
    [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "a hospital's name has letters, digits, - and _ only, got $name"
    hospitals+=("$name") tables+=("$path")
  done
  [ ${#hospitals[@]} -gt 0 ] || fail "no tables NAME.csv in $files"
else
  [ -z "$schema" ] || fail "--schema needs --files: heart disease has its own"
  case $nodes in [1-4]) ;; *) fail "--nodes must be 1 to 4, got $nodes" ;; esac
  for name in cleveland hungarian switzerland va; do
    [ ${#hospitals[@]} -lt "$nodes" ] || break
    [ -f "$data/processed.$name.data" ] || fail "no file $data/processed.$name.data: run fedsso data get heart, or say --data"
    hospitals+=("$name") tables+=("$(cd "$data" && pwd)/processed.$name.data")
  done
fi
nodes=${#hospitals[@]}
if [ -n "$schema" ]; then
  [ -f "$schema" ] || fail "no file $schema: fedsso data schema writes one from a hospital's table"
  schema=$(cd "$(dirname "$schema")" && pwd)/$(basename "$schema")
fi
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
  { wait; } 2>/dev/null # without a line for each that was killed
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
# the installed fedsso is used, not one that Flower would look for
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
printf 'subjectAltName=IP:127.0.0.1\n' >names
{
  openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj "/CN=hospitals" -keyout ca.key -out ca.crt
  openssl req -newkey rsa:2048 -nodes -subj "/CN=127.0.0.1" -keyout server.key -out server.csr
  openssl x509 -req -days 730 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names -out server.pem
} 2>openssl.log
mkdir nodes
for i in "${!hospitals[@]}"; do
  folder=nodes/${hospitals[i]}
  if [ -d "${tables[i]}" ]; then cp -r "${tables[i]}" "$folder"; else mkdir "$folder" && cp "${tables[i]}" "$folder/"; fi
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "${hospitals[i]}" -f "$folder.key"
done
ports=($(python3 -c 'import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in held))' $((nodes + 1))))
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

for i in "${!hospitals[@]}"; do
  name=${hospitals[i]} folder=nodes/${hospitals[i]}
  flwr supernode register "$folder.key.pub" --name "$name" >>register.log 2>&1 || fail "$(tail -n 5 register.log)"
  flower-supernode --superlink "$superlink" --root-certificates ca.crt \
    --auth-supernode-private-key "$folder.key" --host 127.0.0.1 --port "${ports[i + 1]}" \
    --node-config "data-folder=\"$work/$folder\" name=\"$name\"" >"$folder.log" 2>&1 &
done
until [ "$(flwr supernode list --format json | grep -c '"status": "online"')" = "$nodes" ]; do
  [ "$(jobs -rp | wc -l)" -gt "$nodes" ] || fail "a SuperNode did not start: $(tail -n 3 nodes/*.log)"
  sleep 0.2
done
done_with "hospitals registered and online: $nodes"

# ---- the run ----

flwr run "$app" --stream \
  -c "schema=\"$schema\" family=\"$family\" cluster=$cluster min-nodes=$nodes out=\"$out\"" &
wait $! # not in the foreground, where a signal would have to wait for its end
flwr ls --format json | grep -q '"status": "finished:completed"' || fail "the run did not end well, see above"
done_with "the regression"
echo "written to $out:" && ls "$out"
