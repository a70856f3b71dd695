# Character-level GPT-2 on Shakespeare's plays with a learned position table: a minute or two on two CPU cores, seconds on a GPU.
# The other config/shakespeare_*.py change `wpe` and the run's name alone.
dataset = 'shakespeare'
out_dir = 'out/shakespeare_learned'
wpe = 'learned'

block_size = 128
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0       # a run this short does not see the text often enough to memorise it

batch_size = 8
max_iters = 600
learning_rate = 3e-3  # small models bear a large one
warmup_iters = 50
weight_decay = 0.1
beta2 = 0.99        # few tokens an update: average over more of them

eval_interval = 150
eval_tokens = 65536
