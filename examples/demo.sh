# What `make demo` shows; run it yourself where xmem is installed: bash examples/demo.sh
show() {
  printf '\n$ %s\n' "$1"
  eval "$1"
}

show "xmem ingest examples/cpu_training.json.gz examples/cpu_training.timeline.raw.json.gz examples/mobilenet_oom.pickle"
show "xmem ingest examples/gpt_small_a100.pickle"
show "xmem simulate gpt_small_a100 --gpu rtx3060"
show "xmem simulate gpt_small_a100 --gpu 0.8" || echo "(exit code $?)"
show 'xmem query "SELECT category, count(*) AS allocations, sum(bytes) AS bytes FROM at_peak JOIN runs USING (run_id, rank)
    WHERE name = '"'gpt_small_a100'"' GROUP BY category ORDER BY bytes DESC"'
show "xmem ingest examples/convnext_base_sgd_130.xmem.jsonl.gz examples/opt_125m_adam_34.xmem.jsonl.gz"
show "xmem simulate convnext_base_sgd_130 --gpu 4GB" || echo "(exit code $?)"
show "xmem simulate convnext_base_sgd_130 --gpu 8GB"
show "xmem simulate opt_125m_adam_34 --gpu 12GB"
