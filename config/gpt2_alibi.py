from config.gpt2_learned import *

out_dir = 'out/gpt2_alibi'
wpe = 'alibi'
