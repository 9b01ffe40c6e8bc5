# shellcheck shell=bash
# What tools/servers/build.sh and tools/k8s/build.sh have in common; they source it.
#
# Tests run these programs for minutes, and a machine that has none compiles for long: so they are
# compiled without inlining and debug information, and the compilers collect their garbage less
# often. Of Go's standard library that takes half the CPU time.

command -v go >/dev/null || {
    echo "build.sh: Go is missing; install the version that $PWD/go.mod names" >&2
    exit 1
}
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-buildvcs=false GOGC=400

gcflags="-l -dwarf=false"

# build OUTPUT PACKAGE [FLAGS...]: a program, of the module in the working folder.
build() { go build -mod=readonly -trimpath -gcflags "all=$gcflags" -o "$1" "${@:3}" "$2"; }

# exclusive FOLDER: another build of the same folder is waited for.
exclusive() {
    exec 9>"$1/.lock"
    flock 9
}

# current NAME PINS: whether that program or folder is there, made from these pins.
current() { [ -e "$bin/$1" ] && [ "$(cat "$bin/.$1.pins" 2>/dev/null)" = "$2" ]; }

# place FILE NAME PINS: put what is finished in its place in one step.
place() {
    rm -rf "${bin:?}/$2"
    mv -f "$1" "$bin/$2"
    echo "$3" >"$bin/.$2.pins"
    echo "build.sh: $2 is ready ($SECONDS s)"
}
