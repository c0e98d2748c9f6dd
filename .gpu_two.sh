# Two H200s. Run from the root: bash .gpu_two.sh COMMIT [PART ...]; parts in the order of importance.
C=$1; shift
P="${*:-sharding reduce ddp timeline sockets slow model gloo}"
export PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$OUT" out
run() { # run LIMIT LOG COMMAND ...: at most LIMIT seconds, the end of the output on the screen
  began=$SECONDS; limit=$1; log=out/$2.txt; shift 2
  timeout "$limit" python3 -m "$@" --save --commit "$C" > "$log" 2>&1
  echo "== $* : exit code $?, $((SECONDS - began)) s"; tail -n 14 "$log" | cut -c1-180
  tar czf "$OUT/two.tgz" results/torch out/*.txt 2>/dev/null
}
T=benchmarks.torch
for part in $P; do
  case $part in
    sharding) run 170 sharding $T.sharding --minutes 2 ;;
    reduce) run 80 reduce $T.all_reduce --libraries nccl --ranks 2 ;;
    ddp) run 150 ddp $T.ddp --minutes 2 --fresh ;;
    timeline) run 80 timeline $T.ddp --timeline ;;
    sockets) run 90 sockets $T.all_reduce --libraries nccl-sockets --ranks 2 --repeats 3 --warm-up 2 ;;
    slow) run 170 slow $T.ddp --backend nccl-sockets --warm-up 2 --repeats 3 --minutes 2 --save-as ddp_sockets ;;
    model) run 30 model $T.ddp_model
      run 30 model_slow $T.ddp_model --backend nccl-sockets --ddp ddp_sockets --save-as ddp_model_sockets ;;
    gloo) run 200 gloo $T.all_reduce --libraries gloo mpi --minutes 3 ;;
  esac
done
