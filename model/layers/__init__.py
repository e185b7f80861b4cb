"""The layers: linears, norms, rotary embedding, attention, MLP, and the decoder made of them."""
