/* One device for RDMA that does nothing: so that an InfiniStore server starts where there is none.

   The server opens a device before it listens, even if it is only asked over TCP. Of libibverbs.so.1
   it gets a device, its one port, and memory that counts as registered; all else fails. Nothing that
   goes over RDMA is tried by this. Layouts are those of the library's public header, as far as they
   are read. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct mr { void *context, *pd, *addr; size_t length; uint32_t handle, lkey, rkey; };

static char device[1024] = "stub0";
static char context[4096]; /* zeros: no function of its own, so the ones below are called */
static char domain[256];
static void *devices[2];

void **ibv_get_device_list(int *count)
{
    devices[0] = device;
    if (count)
        *count = 1;
    return devices;
}
void ibv_free_device_list(void **list) { (void)list; }
const char *ibv_get_device_name(void *of) { (void)of; return "stub0"; }
void *ibv_open_device(void *of) { (void)of; return context; }
int ibv_close_device(void *of) { (void)of; return 0; }
void *ibv_alloc_pd(void *of) { (void)of; return domain; }
int ibv_dealloc_pd(void *of) { (void)of; return 0; }

int ibv_query_port(void *of, uint8_t port, unsigned char *into)
{
    uint32_t active = 4, mtu = 5;
    (void)of, (void)port;
    memset(into, 0, 48); /* what the oldest callers have room for */
    memcpy(into, &active, 4);
    memcpy(into + 4, &mtu, 4);
    memcpy(into + 8, &mtu, 4);
    into[34] = 1; /* lid */
    into[46] = 1; /* link layer: InfiniBand */
    return 0;
}

static void *registered(void *pd, void *addr, size_t length)
{
    struct mr *one = calloc(1, 256);
    one->context = context, one->pd = pd, one->addr = addr, one->length = length;
    one->lkey = one->rkey = 1;
    return one;
}
void *ibv_reg_mr(void *pd, void *addr, size_t length, int access)
{
    (void)access;
    return registered(pd, addr, length);
}
void *ibv_reg_mr_iova(void *pd, void *addr, size_t length, uint64_t iova, int access)
{
    (void)iova, (void)access;
    return registered(pd, addr, length);
}
void *ibv_reg_mr_iova2(void *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
    (void)iova, (void)access;
    return registered(pd, addr, length);
}
int ibv_dereg_mr(void *of) { free(of); return 0; }

/* What only connections over RDMA ask for. */
int ibv_query_gid(void *of, uint8_t port, int index, void *gid)
{
    (void)of, (void)port, (void)index;
    memset(gid, 0, 16);
    return -1;
}
void *ibv_create_comp_channel(void *of) { (void)of; return NULL; }
int ibv_destroy_comp_channel(void *of) { (void)of; return 0; }
void *ibv_create_cq(void *of, int n, void *c, void *channel, int v)
{
    (void)of, (void)n, (void)c, (void)channel, (void)v;
    return NULL;
}
int ibv_destroy_cq(void *of) { (void)of; return 0; }
int ibv_get_cq_event(void *channel, void **cq, void **c) { (void)channel, (void)cq, (void)c; return -1; }
void ibv_ack_cq_events(void *cq, unsigned n) { (void)cq, (void)n; }
void *ibv_create_qp(void *pd, void *attributes) { (void)pd, (void)attributes; return NULL; }
int ibv_modify_qp(void *qp, void *attributes, int mask) { (void)qp, (void)attributes, (void)mask; return -1; }
int ibv_destroy_qp(void *qp) { (void)qp; return 0; }
const char *ibv_wc_status_str(int status) { (void)status; return "stub"; }
