# One H200. Run from the root: bash .gpu_one.sh COMMIT [PART ...]; parts in the order of importance.
C=$1; shift
P="${*:-end profile memory sums attention matmul}"
export PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$OUT" out
run() { # run LIMIT LOG COMMAND ...: at most LIMIT seconds, the end of the output on the screen
  began=$SECONDS; limit=$1; log=out/$2.txt; shift 2
  timeout "$limit" python3 -m "$@" --save --commit "$C" > "$log" 2>&1
  echo "== $* : exit code $?, $((SECONDS - began)) s"; tail -n 14 "$log" | cut -c1-180
  tar czf "$OUT/one.tgz" results/torch out/*.txt 2>/dev/null
}
for part in $P; do
  case $part in
    end) run 260 end benchmarks.torch.end_to_end --minutes 3 ;;
    profile) run 120 profile benchmarks.torch.profile --minutes 1.4 ;;
    memory) run 140 memory benchmarks.torch.memory --minutes 1.6 ;;
    sums) run 60 sums benchmarks.torch.accumulation ;;
    attention) run 110 attention benchmarks.torch.attention --only memory --minutes 1.4 --repeats 20 ;;
    matmul) run 100 matmul benchmarks.torch.matmul_search --size 1024 4096 --rounds 7 --minutes 1 ;;
    grid) run 580 grid benchmarks.torch.attention --only grid --warmup 5 --rep 20 --minutes 8.5 ;;
    tiles) run 200 tiles benchmarks.torch.attention_tiles --minutes 3 ;;
  esac
done
