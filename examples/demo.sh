# What `make demo` shows; run it yourself where xmem is installed: bash examples/demo.sh
show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

show xmem ingest examples/cpu_training.json.gz examples/cpu_training.timeline.raw.json.gz examples/mobilenet_oom.pickle examples/gpt_small_a100.pickle
show xmem simulate gpt_small_a100 --gpu 24
show xmem simulate gpt_small_a100 --gpu 1 || echo "(exit code $?: it does not fit)"
show xmem query "SELECT category, count(*) AS allocations, sum(bytes) AS bytes FROM at_peak JOIN runs USING (run_id, rank) WHERE name = 'gpt_small_a100' GROUP BY category ORDER BY bytes DESC"
