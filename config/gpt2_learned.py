# GPT-2 124M with its learned position table on OpenWebText: 10 billion tokens, about the data set once.
# One 80 GB GPU trains it in hours; on a 24 GB card halve batch_size, double gradient_accumulation_steps and set eval_batch_size = 4.
# The other config/gpt2_*.py change `wpe` and the run's name alone.
dataset = 'openwebtext'
out_dir = 'out/gpt2_learned'
wpe = 'learned'

block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
vocab_multiple = 128  # 50,257 tokens in 50,304 rows: aligned matrices are faster on tensor cores
dropout = 0.0         # nothing is seen twice

batch_size = 32
gradient_accumulation_steps = 16  # 32 * 16 * 1024 = 524,288 tokens an update, as GPT-3's paper has for this size
max_iters = 19073                 # 10 billion tokens
learning_rate = 6e-4
warmup_iters = 700
weight_decay = 0.1
beta2 = 0.95

eval_interval = 250
eval_tokens = 1048576
checkpoint_interval = 1000
eval_batch_size = 32
