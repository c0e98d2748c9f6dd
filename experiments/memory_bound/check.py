import ctypes, numpy as np, ml_dtypes
bf=ml_dtypes.bfloat16; lib=ctypes.CDLL('./emu.so'); C=768; n=300; rng=np.random.default_rng(0)
def al(a):
    b=np.zeros(a.nbytes+64,np.uint8); o=-b.ctypes.data%64; v=b[o:o+a.nbytes].view(a.dtype).reshape(a.shape); v[...]=a; return v
P=lambda *a:(ctypes.c_void_p*len(a))(*(None if x is None else x.ctypes.data for x in a))
N=lambda *s: al(rng.standard_normal(s).astype(bf))
f64=lambda a:a.astype(np.float64)
dy,s,ds,w,b=N(n,C),N(n,C),N(n,C),N(C),N(C)
mean=al(f64(s).mean(1).astype(np.float32)); rstd=al((1/np.sqrt(f64(s).var(1)+1e-5)).astype(np.float32))
for D in (ds,None):
    dx=al(np.zeros((n,C),bf)); blocks=16; part=al(np.full((blocks,3*C),np.nan,np.float32))
    lib.run(0,blocks,P(dx,part,D,dy,s,w,mean,rstd),n,0,0,ctypes.c_float(0))
    h=(f64(s)-mean[:,None])*rstd[:,None]; g=f64(dy)*f64(w)
    want=(g-g.mean(1,keepdims=True)-h*(g*h).mean(1,keepdims=True))*rstd[:,None]+(0 if D is None else f64(D))
    print('dx',np.abs(f64(dx)-want).max(), [np.abs(part.astype(np.float64).sum(0)[i*C:(i+1)*C]-v).max() for i,v in enumerate(((f64(dy)*h).sum(0),f64(dy).sum(0),want.sum(0)))])
for A in (N(n,C),None):
    x=N(n,C); bias=N(C); so=al(np.zeros((n,C),bf)); y=al(np.zeros((n,C),bf)); m=al(np.zeros(n,np.float32)); r=al(np.zeros(n,np.float32))
    lib.run(1,16,P(so,y,m,r,x,A,bias if A is not None else None,w,b),n,0,0,ctypes.c_float(1e-5))
    sw=f64(x) if A is None else f64((f64(x)+f64(A)+f64(bias)).astype(np.float32).astype(bf))
    h=(sw-sw.mean(1,keepdims=True))/np.sqrt(sw.var(1,keepdims=True)+1e-5)*f64(w)+f64(b)
    print('fwd',np.abs(f64(y)-h).max(), np.abs(m-sw.mean(1)).max(), 0 if A is None else np.abs(f64(so)-sw).max())
n,vocab,width=16,1009,1024
L=N(n,width); L0=f64(L).copy(); t=al(rng.integers(0,vocab,n).astype(np.int32)); mx,sm,tl=(al(np.zeros(n,np.float32)) for _ in range(3))
lib.run(2,16,P(L,mx,sm,tl,t),n,vocab,width,ctypes.c_float(0.25))
p=np.exp(L0[:,:vocab]-L0[:,:vocab].max(1,keepdims=True)); want=np.zeros((n,width)); want[:,:vocab]=p/p.sum(1,keepdims=True)*.25; want[np.arange(n),t]-=.25
print('ce',np.abs(f64(L)-want).max(), np.abs(mx-L0[:,:vocab].max(1)).max(), np.abs(sm/p.sum(1)-1).max(), np.abs(tl-L0[np.arange(n),t]).max())
