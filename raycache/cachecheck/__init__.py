"""Black-box test of a server's prefix cache: is an answer from the cache the answer without it?"""
