from config.shakespeare_learned import *

out_dir = 'out/shakespeare_alibi'
wpe = 'alibi'
