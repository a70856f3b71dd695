# GPT-2 124M with RoPE, the blocks' matrices trained by Muon at its authors' rate. The rest is a start: nothing here has been tuned yet.
from config.gpt2_rope import *

out_dir = 'out/gpt2_muon'
optimizer = 'muon'
muon_lr = 0.02
muon_weight_decay = 0.01
learning_rate = 3e-3  # of AdamW, for embeddings and vectors alone
min_lr = 0.0
lr_decay = 'linear'
warmup_iters = 250
