class Comparison: pass
def verify(folder): pass
