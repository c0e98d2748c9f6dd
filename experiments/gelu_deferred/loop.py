"""The inner loops with HGMMA: opcode sequence compressed."""
import re,sys
src=open(sys.argv[1]).read().splitlines()
ins=[];labels={}
for l in src:
    m=re.match(r"^(\.L_x_\d+):",l)
    if m: labels[m.group(1)]=len(ins); ins.append("LABEL "+m.group(1)); continue
    m=re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;",l)
    if m: ins.append(m.group(1).strip())
loops=[]
for i,x in enumerate(ins):
    m=re.search(r"BRA(?:\.\w+)*\s.*`\((\.L_x_\d+)\)",x)
    if m and labels.get(m.group(1),1e9)<=i: loops.append((labels[m.group(1)],i))
for a,b in loops:
    body=ins[a:b+1]
    if any("HGMMA" in x for x in body):
        mx=max((int(r) for x in body for r in re.findall(r"\bR(\d+)\b",x)),default=0)
        print(f"loop {a}-{b}: {b-a+1} instructions, max R{mx}", "inner" if not any(a<c and d<=b and any("HGMMA" in y for y in ins[c:d+1]) for c,d in loops if (c,d)!=(a,b)) else "outer")
        if len(sys.argv)>2 and len(body)<int(sys.argv[2]):
            for x in body: print("   ",x)
