# A good character model as fast as a small machine can: two wide layers, RoPE, Muon.
dataset = 'shakespeare'
out_dir = 'out/shakespeare_fast'
wpe = 'rope'

block_size = 64
n_layer = 2
n_head = 3
n_embd = 192
bias = False

batch_size = 24
max_iters = 260
optimizer = 'muon'
muon_lr = 0.03
learning_rate = 8e-3
min_lr = 8e-5
lr_decay = 'linear'  # ends lower than a cosine in so few updates
warmup_iters = 20
weight_decay = 0.0
beta2 = 0.99

eval_interval = 260
eval_tokens = 8192
