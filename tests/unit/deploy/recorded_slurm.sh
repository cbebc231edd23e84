#!/usr/bin/env bash
# A recorded stand-in for srun, scontrol, ray and strop, because no Slurm cluster can be had where the tests run. Called by
# one of these names it adds what it was told to do to $RECORDED/calls, and does as much of it as the script needs: steps
# run here, `ray status` counts the nodes that were started, strop begins a run and ends with the signal that it gets.
name=$(basename "$0")
case $name in
    srun)
        node=
        while [[ $1 == --* ]]; do
            [[ $1 == --nodelist=* ]] && node=${1#--nodelist=}
            shift
        done
        [ "$1" = ray ] || [ "$node" != "$(cat "$RECORDED/blind" 2>/dev/null)" ] || exit 1
        [ "$1" = hostname ] && echo "127.0.1.1 fe80::1 10.0.0.7" && exit 0
        ON_NODE=$node exec "$@"
        ;;
    scontrol) [ "$1" = show ] && { tr , '\n' <<<"$3"; exit 0; } ;;
    ray)
        if [ "$1" = status ]; then
            echo "Active:"
            for file in "$RECORDED"/node-*; do [ -e "$file" ] && echo " 1 node_$(basename "$file")"; done
            exit 0
        fi
        ;;
esac
echo "$name${ON_NODE:+@$ON_NODE} $*" >>"$RECORDED/calls"
end() {
    echo "$name${ON_NODE:+@$ON_NODE} got $1" >>"$RECORDED/calls"
    exit "$2"
}
trap 'end INT 130' INT
trap 'end TERM 143' TERM
case $name in
    ray) touch "$RECORDED/node-$ON_NODE" ;;
    strop)
        [ -e "$RECORDED/fail" ] && exit 1
        [ "$2" = --resume ] && run=$3 || run=$5
        mkdir -p "$run" && touch "$run/config.json"
        [ -e "$RECORDED/finish" ] && exit 0
        ;;
    *) exit 0 ;;
esac
touch "$RECORDED/$name-waits"
while :; do sleep 0.05; done
