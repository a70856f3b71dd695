# A good character model as fast as a small machine can: two layers, RoPE, Muon at a high rate.
dataset = 'shakespeare'
out_dir = 'out/shakespeare_fast'
wpe = 'rope'

block_size = 64
n_layer = 2
n_head = 3
n_embd = 96
bias = False

batch_size = 32
max_iters = 220
optimizer = 'muon'
muon_lr = 0.08
muon_momentum = 0.85
learning_rate = 1e-2
min_lr = 1e-4
lr_decay = 'linear'  # ends lower than a cosine in so few updates
warmup_iters = 5
weight_decay = 0.0
beta2 = 0.99

eval_interval = 220
eval_tokens = 8192
